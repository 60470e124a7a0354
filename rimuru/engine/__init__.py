"""Scheduling, stepping, sampling: the control plane of one model."""

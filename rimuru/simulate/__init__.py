"""The control plane at full size without a device: real scheduler, memory and residency, a time model for the rest."""

"""Nouns every package may use: units, errors, environment, logging, metrics, clocks."""

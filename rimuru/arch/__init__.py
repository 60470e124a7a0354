"""Architectures as data: which layers a model has, read from GGUF metadata. No arrays, no forward code."""

"""Where each expert is, and moving it: residency, the store, its sources on disk."""

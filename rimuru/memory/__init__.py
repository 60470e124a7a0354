"""The shared page pool: layout, allocation and views. Integers and NumPy only; no device library."""

"""Backends: the libraries that compute. `base` defines the interface; each framework has one package."""

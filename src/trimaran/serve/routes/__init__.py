"""Handlers of the endpoints, one file an interface."""

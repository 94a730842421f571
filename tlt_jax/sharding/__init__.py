"""Meshes, partition rules and movement of arrays."""

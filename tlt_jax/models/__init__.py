"""Decoder definitions: device-pure functions and NNX modules."""

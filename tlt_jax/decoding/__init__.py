"""Sampling and decode rounds: device-pure."""

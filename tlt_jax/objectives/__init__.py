"""Advantages, losses and policy updates: device-pure."""

"""A reinforcement-learning trainer for reasoning models in JAX whose rollouts do not wait for the long tail."""

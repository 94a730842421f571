"""Prompts, tokenizers and generated tasks: host-pure."""

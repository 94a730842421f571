"""Scoring of responses: host-pure."""

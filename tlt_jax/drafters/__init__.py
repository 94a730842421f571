"""Drafters: what proposes the tokens that the policy verifies. Device-pure; none of them can change a token."""

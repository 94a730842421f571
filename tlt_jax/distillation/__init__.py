"""Training a drafter on the policy's own text: device-pure."""

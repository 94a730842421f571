"""Settings, building and the training stages."""

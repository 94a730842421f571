"""Run configurations: each file's get_config() returns the default config with its own changes."""

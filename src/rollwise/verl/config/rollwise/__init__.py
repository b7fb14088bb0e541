"""The `rollwise:` block of the configuration."""

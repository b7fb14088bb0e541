"""The configuration that `rollwise.verl.main` starts from."""

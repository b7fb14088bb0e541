"""Importing this checks that a tested release of verl is installed; it comes before any import of verl's."""

from rollwise.verl import check_verl_version

check_verl_version()

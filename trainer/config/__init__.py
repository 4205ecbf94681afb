"""The configuration of a run: sections, checks, and reading TOML files and command lines. Imports no torch."""

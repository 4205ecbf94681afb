"""The configuration of a run: sections, validation, and parsing of TOML files and command lines. Imports no torch."""

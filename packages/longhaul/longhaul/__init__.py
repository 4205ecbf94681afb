"""The one name that an installed Longhaul has: its rooms lie inside, and are found before folders
of the same names.
"""

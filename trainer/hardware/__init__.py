"""Devices: what this machine has, and the tables of peak rates that training and planning share."""

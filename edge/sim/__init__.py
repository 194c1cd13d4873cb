"""The simulator: a fleet of unlike devices in virtual time, around the same aggregator that production runs.

This package imports nothing on its own account: name the module you want.
"""

"""Instruments of the tests: jobs, networks and faults drawn at random, hostile inputs, and records of the tests
themselves.
"""

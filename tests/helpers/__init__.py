"""Shared by the tests: launchers of real processes, networks and data of users, golden files, folders."""

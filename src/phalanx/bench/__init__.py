"""Measurements that people compare."""

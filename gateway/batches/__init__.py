"""Batches: files of requests that are answered within a day, at lower priority.

The state of a batch is a set of records that are written once, in a directory or a bucket, so any gateway can
continue a batch of another one.
"""

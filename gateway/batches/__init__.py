"""Batches: files of requests that are answered within a day, at lower priority.

The state of a batch is a set of records, which are written once, in a directory or a bucket. So any gateway can
continue a batch that another gateway began.
"""

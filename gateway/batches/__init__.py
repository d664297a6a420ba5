"""Batches: files of requests that are answered within a day, after all who wait.

A store of records that are written once, a directory or a bucket, is the whole truth: what a batch
has come to is which records there are. So any gateway goes on where another one died.
"""

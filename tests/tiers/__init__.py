"""Tests of objects in files, Redis and buckets."""

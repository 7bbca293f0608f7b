"""Tests of objects in files, Redis, buckets and a Mooncake Store."""

"""Tests of objects in files, Redis, buckets, a Mooncake Store and peers."""

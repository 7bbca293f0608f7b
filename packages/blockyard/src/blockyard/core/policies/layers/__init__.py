"""Layers around the policy that chooses: retention, tenants, hints about sessions."""

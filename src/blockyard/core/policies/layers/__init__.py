"""What may stand around the policy that chooses: retention, guards, hints about sessions."""

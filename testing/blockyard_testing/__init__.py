"""What tests of several packages share. It is not published."""

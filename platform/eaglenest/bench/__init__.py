"""Speculative against plain decoding, measured over HTTP."""

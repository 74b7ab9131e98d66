"""Streams of a run, copies to and from the host, and the choice between one stream and several."""

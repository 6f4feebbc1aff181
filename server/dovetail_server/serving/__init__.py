"""From a checked request to engine submissions, and from engine deltas to a reply or a stream."""

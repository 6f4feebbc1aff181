"""What tests of plugins need, ours and third parties'; `docs/testing.md` is its documentation.

```python
from dovetail_testing import ReasoningParserConformance, Sample

class TestAcme(ReasoningParserConformance):
    name = "acme-r2"
    samples = [Sample("<r>think</r>answer", reasoning="think", content="answer")]
```

The conformance classes need pytest; nothing else here does. What this package offers is imported on first use, so that
importing it imports neither pytest nor torch.
"""

from dovetail.contracts.offered import offered

__all__, __getattr__ = offered(__name__, __file__)

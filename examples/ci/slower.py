"""Exit with 1 if the second of two results of `optuna-dsat tune --json` is slower, by more than the interval."""

import json
import math
import sys
from pathlib import Path

base, head = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
sign = -1 if base["metric"] in ("latency", "forward", "backward", "step") else 1
ratio = (head["value"] / base["value"]) ** sign
half = math.hypot(*(math.log(result["high"] / result["low"]) / 2 for result in (base, head)))
low, high = ratio * math.exp(-half), ratio * math.exp(half)
print(f"{base['metric']}: {base['value']:.4g} before, {head['value']:.4g} now")
print(f"{ratio:.3f}x as fast (95% CI {low:.3f} to {high:.3f})")
sys.exit(high < 1)

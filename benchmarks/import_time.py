"""What `import llm_spec` costs beyond numpy: the best of several fresh interpreters, in milliseconds.

python benchmarks/import_time.py
"""

import subprocess
import sys

CODE = "import numpy, time; t = time.perf_counter(); import llm_spec; print(time.perf_counter() - t)"


def main() -> None:
    times = [float(subprocess.check_output([sys.executable, "-c", CODE])) for _ in range(12)]  # noqa: S603 - our own code
    print(f"import llm_spec beyond numpy: best {min(times) * 1e3:.0f} ms, median {sorted(times)[6] * 1e3:.0f} ms")


if __name__ == "__main__":
    main()

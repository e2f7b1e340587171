"""``python3 -m gpuprestart``: the same program as /usr/bin/gpuprestart."""

from .cli import run

if __name__ == "__main__":
    run()

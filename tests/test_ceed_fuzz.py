"""A sample of the fuzz run, in a process of its own: nothing that is called in any order ends it, or leaks."""

from ceed_helpers import check_python


def test_sample():
    out = check_python(
        """
        from fuzz.fuzz_ceed import fuzz
        result = fuzz(3000, seed=1)
        assert result["valid"] > 4000, result
        assert result["MB"][-1] - result["MB"][3] < 10, result["MB"]
        print(result["sequences"])
        """
    )
    assert out == "3000\n"

import os
import signal

import pytest

from integrations.diffusion_nft.interrupt import Interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_the_next_check_and_handlers_come_back(number):
    before = signal.getsignal(number)
    interrupt = Interrupt()
    with interrupt.listening():
        interrupt.check()
        os.kill(os.getpid(), number)
        assert interrupt.requested
        assert signal.getsignal(number) is before
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
    assert signal.getsignal(number) is before


@pytest.fixture
def ctrl_c_raises():
    """A process that a shell started in the background ignores SIGINT from birth."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_a_second_ctrl_c_stops_at_once():
    with Interrupt().listening():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)

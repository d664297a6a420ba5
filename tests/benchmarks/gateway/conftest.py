from tests.loadtest.conftest import fake as fake

/* Ctrl-C while a program waits for Python.
 *
 * Python's main thread handles signals, and it cannot while it is inside of XLA. Where the wait is on that thread, the
 * handlers are run there. Where it is on a thread of XLA's, the main thread waits for the program, in XLA's code: there
 * a signal that would raise KeyboardInterrupt ends the wait, the program fails, and the main thread comes back. */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include "signals.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

int ct_python_runs(void) { return Py_IsInitialized(); }

int ct_on_main_thread(void) { return syscall(SYS_gettid) == getpid(); }

/* What a signal handler of Python's raised while the main thread was inside of XLA. */
typedef struct raised {
  PyObject *type, *value, *traceback;
} raised;

static int raise_again(void *object) {
  raised exception = *(raised *)object;
  free(object);
  PyErr_Restore(exception.type, exception.value, exception.traceback);
  return -1;
}

int ct_run_signal_handlers(void) {
  if (!Py_IsInitialized()) return 0;
  PyGILState_STATE gil = PyGILState_Ensure();
  int raises = PyErr_CheckSignals() != 0;
  if (raises) {
    raised *exception = malloc(sizeof *exception);
    if (exception) {
/* Its successor came with Python 3.12. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
      PyErr_Fetch(&exception->type, &exception->value, &exception->traceback);
#pragma GCC diagnostic pop
      if (Py_AddPendingCall(raise_again, exception)) free(exception);
    }
    PyErr_Clear();
  }
  PyGILState_Release(gil);
  return raises;
}

/* -- on other threads -------------------------------------------------------------------------------------------- */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int watchers;
static struct sigaction before; /* what Python, or the program, does with the signal */
static volatile sig_atomic_t count;

static void note(int number, siginfo_t *info, void *context) {
  count++;
  if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, info, context);
  else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(number);
}

static int is_ours(const struct sigaction *action) { return action->sa_flags & SA_SIGINFO && action->sa_sigaction == note; }

int ct_watch_signals(void) {
  pthread_mutex_lock(&mutex);
  struct sigaction now, ours = {.sa_sigaction = note, .sa_flags = SA_SIGINFO};
  sigemptyset(&ours.sa_mask);
  if (watchers++ == 0 && !sigaction(SIGINT, NULL, &now) && !is_ours(&now) &&
      (now.sa_flags & SA_SIGINFO || (now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN))) {
    before = now;
    sigaction(SIGINT, &ours, NULL);
  }
  int seen = count;
  pthread_mutex_unlock(&mutex);
  return seen;
}

void ct_unwatch_signals(void) {
  pthread_mutex_lock(&mutex);
  struct sigaction now;
  /* Whoever has set another handler meanwhile keeps it. */
  if (--watchers == 0 && !sigaction(SIGINT, NULL, &now) && is_ours(&now)) sigaction(SIGINT, &before, NULL);
  pthread_mutex_unlock(&mutex);
}

void ct_signals_after_fork(void) {
  mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  if (watchers == 0) return;
  watchers = 1; /* of which the parent's threads know nothing any more */
  ct_unwatch_signals();
}

/* Whether Python would raise KeyboardInterrupt. */
static int is_interrupt(void) {
  if (!Py_IsInitialized()) return 0;
  PyGILState_STATE gil = PyGILState_Ensure();
  PyObject *module = PyImport_ImportModule("signal");
  PyObject *handler = module ? PyObject_CallMethod(module, "getsignal", "i", SIGINT) : NULL;
  PyObject *standard = module ? PyObject_GetAttrString(module, "default_int_handler") : NULL;
  int same = handler && handler == standard;
  Py_XDECREF(standard);
  Py_XDECREF(handler);
  Py_XDECREF(module);
  PyErr_Clear();
  PyGILState_Release(gil);
  return same;
}

int ct_interrupted(int *seen) {
  if (ct_on_main_thread()) return ct_run_signal_handlers();
  if (count == *seen) return 0;
  *seen = count;
  return is_interrupt();
}

/* Ctrl-C while a program waits for Python. */
#ifndef CEEDTAP_SIGNALS_H
#define CEEDTAP_SIGNALS_H

enum { CT_SIGNAL_POLL_MS = 100 }; /* how often a thread that waits asks */

int ct_python_runs(void);    /* 0: the interpreter has ended */
int ct_on_main_thread(void); /* Python's */
/* On the main thread: runs the handlers of signals that have come. 1: one of them raised; the exception is raised again
 * when XLA has returned to Python. */
int ct_run_signal_handlers(void);
/* Around a wait, on any thread: the number of signals that have come. */
int ct_watch_signals(void);
void ct_unwatch_signals(void);
/* In it, without locks that Python's threads take: whether the wait shall end. */
int ct_interrupted(int *seen);
void ct_signals_after_fork(void); /* in the child */

#endif

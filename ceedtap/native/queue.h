/* The producers' side of the queue. */
#ifndef CEEDTAP_QUEUE_H
#define CEEDTAP_QUEUE_H

#include "ceedtap.h"

ct_frame *ct_queue_reserve(uint64_t size, int *closed);
void ct_queue_commit(ct_frame *frame);

#endif

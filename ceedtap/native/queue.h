/* The producers' side of the queue. */
#ifndef CEEDTAP_QUEUE_H
#define CEEDTAP_QUEUE_H

#include "ceedtap.h"

/* A frame to fill, or what became of the event (CT_RESERVED ...). */
int ct_queue_reserve(ct_consumer *consumer, int32_t device, uint64_t size, ct_frame **frame);
void ct_queue_commit(ct_frame *frame);

#endif

//! Memory that a peer can see and change: DMA maps, PRP and SGL resolution, shared mappings.


//! What must always hold of the learner, over thousands of steps of friendly and hostile streams.

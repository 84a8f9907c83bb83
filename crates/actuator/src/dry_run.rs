//! The same interface, and nothing moves.

use plimsoll_flow::VmId;

use crate::{Actuator, ActuatorError, Holding, Look};

/// A change that would have been made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wish {
    /// What the VM had when it was wished for, by the last look; `None` before any.
    pub had: Option<Holding>,
    /// Memory of its own that it would be told to have.
    pub direct_bytes: Option<u64>,
    /// Capacity of the cache under its disk that would be set.
    pub cache_bytes: Option<u64>,
}

/// An actuator that is asked and never told: sets end here, and are kept as the last [`Wish`].
#[derive(Debug)]
pub struct DryRun<A> {
    inner: A,
    had: Option<Holding>,
    /// Whether there is a cache, by the last look.
    has_cache: bool,
    wish: Option<Wish>,
}

impl<A: Actuator> DryRun<A> {
    /// Asks through `inner`.
    #[must_use]
    pub fn new(inner: A) -> Self {
        Self {
            inner,
            had: None,
            has_cache: false,
            wish: None,
        }
    }

    /// What would have been set since this was last called.
    pub fn take_wish(&mut self) -> Option<Wish> {
        self.wish.take()
    }

    fn wish(&mut self) -> &mut Wish {
        let had = self.had;
        self.wish.get_or_insert(Wish {
            had,
            direct_bytes: None,
            cache_bytes: None,
        })
    }
}

impl<A: Actuator> Actuator for DryRun<A> {
    fn vm(&self) -> &VmId {
        self.inner.vm()
    }

    fn look(&mut self) -> Look {
        let look = self.inner.look();
        self.had = Some(look.holding());
        self.has_cache = look.cache.is_some();
        look
    }

    fn set_direct(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        self.wish().direct_bytes = Some(target_bytes);
        Ok(())
    }

    fn set_cache(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        if self.had.is_some() && !self.has_cache {
            return Err(ActuatorError::NoCache(self.vm().clone()));
        }
        self.wish().cache_bytes = Some(target_bytes);
        Ok(())
    }
}

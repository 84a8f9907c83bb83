//! The routes of the API, and their description by OpenAPI: `docs/openapi.json`.

use std::sync::Arc;

use plimsoll_protocol::request::Refusal;
use utoipa::openapi::path::Operation;
use utoipa::openapi::schema::{AnyOfBuilder, SchemaType, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{
    Components, Content, ObjectBuilder, Ref, RefOr, Required, ResponseBuilder, Schema,
};
use utoipa::{Modify, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{ApiState, change, demands, events, metrics, rightsize, views, what_if};

#[derive(OpenApi)]
#[openapi(
    info(title = "plimsolld", description = "The state of plimsolld, and requests to it.", license(name = "Apache-2.0 OR MIT")),
    components(schemas(Refusal)),
    modifiers(&Token),
    security((), ("token" = [])),
)]
struct Document;

/// The token required over TCP.
struct Token;

impl Modify for Token {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let token = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("Required over TCP if a token is configured."))
            .build();
        document
            .components
            .get_or_insert_with(Components::new)
            .add_security_scheme("token", SecurityScheme::Http(token));
    }
}

/// All routes of the API.
pub(super) fn routes() -> OpenApiRouter<Arc<ApiState>> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(views::host))
        .routes(routes!(views::vms))
        .routes(routes!(views::vm, change::set))
        .routes(routes!(views::curve))
        .routes(routes!(views::history))
        .routes(routes!(views::curves))
        .routes(routes!(views::groups))
        .routes(routes!(views::group))
        .routes(routes!(views::group_history))
        .routes(routes!(rightsize::rightsize))
        .routes(routes!(demands::demands))
        .routes(routes!(views::heatmap))
        .routes(routes!(views::explain))
        .routes(routes!(what_if::vm))
        .routes(routes!(what_if::host))
        .routes(routes!(views::plan))
        .routes(routes!(views::decisions))
        .routes(routes!(views::decision))
        .routes(routes!(what_if::replay))
        .routes(routes!(events::events))
        .routes(routes!(metrics::metrics))
        .routes(routes!(views::health))
        .routes(routes!(change::apply))
        .routes(routes!(change::roll_back))
        .routes(routes!(change::pause))
        .routes(routes!(change::resume))
        .routes(routes!(change::reload))
}

/// The OpenAPI description of the API.
pub fn openapi() -> utoipa::openapi::OpenApi {
    let mut document = routes().into_openapi();
    for path in document.paths.paths.values_mut() {
        let operations = [&mut path.get, &mut path.post, &mut path.patch];
        for operation in operations.into_iter().flatten() {
            may_be_refused(operation);
            may_lack_body(operation);
        }
    }
    let schemas = document
        .components
        .iter_mut()
        .flat_map(|all| all.schemas.values_mut());
    schemas.for_each(may_lack_fields);
    document
}

/// Fields that stand among others, or not at all: utoipa requires the whole answer to be null then.
fn may_lack_fields(schema: &mut RefOr<Schema>) {
    let RefOr::T(Schema::AllOf(all)) = schema else {
        return;
    };
    for part in &mut all.items {
        let RefOr::T(Schema::OneOf(one)) = part else {
            continue;
        };
        let is_null = |item: &RefOr<Schema>| matches!(item, RefOr::T(Schema::Object(object)) if object.schema_type == SchemaType::new(Type::Null));
        if let Some(null) = one.items.iter_mut().find(|item| is_null(item)) {
            *null = ObjectBuilder::new().into();
            let any = std::mem::take(&mut one.items);
            *part = any
                .into_iter()
                .fold(AnyOfBuilder::new(), AnyOfBuilder::item)
                .into();
        }
    }
}

/// No body is as good as `{}`.
fn may_lack_body(operation: &mut Operation) {
    if let Some(body) = &mut operation.request_body {
        body.required = Some(Required::False);
    }
}

/// Every other answer is a refusal.
fn may_be_refused(operation: &mut Operation) {
    let refusal = Content::new(Some(Ref::from_schema_name("Refusal")));
    let refused = ResponseBuilder::new()
        .description("Refused; the status follows from `kind`.")
        .content("application/json", refusal);
    let responses = &mut operation.responses.responses;
    responses.insert("default".to_owned(), refused.build().into());
}
